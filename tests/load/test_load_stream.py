"""Streams as they are in the wild, read from their bytes."""

import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wild_server import HEAD, chunked, event, plain, stream, text, usage

from k25lib.load.stream import Outcome, events

TOKENS = 6


def exchange(parts, end="complete", detail=None):
    """An exchange whose parts came 10 ms apart."""
    pieces = [(index * 10_000_000, index * 10_000_000, part) for index, part in enumerate(parts)]
    return {"pieces": pieces, "end": end, "detail": detail}


def read(parts, end="complete", detail=None):
    return Outcome(exchange(parts, end, detail), TOKENS)


def words(count=TOKENS, **more):
    return [event(text(), **more) for _ in range(count)]


DONE = b"data: [DONE]\n\n"


def figures(outcome):
    return outcome.kind, outcome.output_tokens, outcome.tokens, outcome.usage.get("prompt_tokens")


def test_plain_stream():
    outcome = read(stream(*words(), event(**usage(TOKENS)), DONE))
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, 8)
    assert outcome.tokens_from == "usage"
    assert outcome.times_ns == [10_000_000 * index for index in range(1, TOKENS + 1)]


GOOD = {
    "crlf": [*words(end="\r\n\r\n"), event(**usage(TOKENS), end="\r\n\r\n"), b"data: [DONE]\r\n\r\n"],
    "cr": [*words(end="\r\r"), event(**usage(TOKENS), end="\r\r"), b"data: [DONE]\r\r"],
    "no space": [*words(space=""), event(**usage(TOKENS), space=""), b"data:[DONE]\n\n"],
    "comments": [b": ping\n\n", *words(3), b": keep-alive\n\n: again\n", *words(3), event(**usage(TOKENS)), DONE],
    "comment before the event, in one block": [b": ping\n" + word for word in words()] + [event(**usage(TOKENS)), DONE],
    "ids and event names": [b"id: 7\nevent: message\nretry: 10\n" + word for word in words()]
    + [event(**usage(TOKENS)), DONE],
    "no DONE": [*words(), event(**usage(TOKENS))],
    "usage on the last token": [*words(5), event(text(), **usage(TOKENS)), DONE],
    "usage null on tokens": [*words(usage=None), event(**usage(TOKENS)), DONE],
    "byte order mark": [b"\xef\xbb\xbf" + words(1)[0], *words(5), event(**usage(TOKENS)), DONE],
    "no blank line at the end": [*words(), event(**usage(TOKENS), end="\n")],
    "empty data": [b"data:\n\n", *words(), event(**usage(TOKENS)), DONE],
    "finish apart": [*words(), event(text("", "length")), event(**usage(TOKENS)), DONE],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_streams_give_the_same(name):
    outcome = read(stream(*GOOD[name]))
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, 8), outcome.message


@pytest.mark.parametrize("name", GOOD)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_cut_of_the_bytes_gives_the_same(name, data):
    raw = b"".join(stream(*GOOD[name]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=30)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert figures(read(pieces)) == ("ok", TOKENS, [1] * TOKENS, 8)


@given(body=st.binary(max_size=200), cuts=st.sets(st.integers(0, 200), max_size=20))
def test_events_do_not_depend_on_cuts(body, cuts):
    body = body.replace(b"d", b"data:").replace(b"n", b"\n")
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    whole = [(name, data) for _, name, data in events([(0, body)])]
    parts = [(0, body[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert [(name, data) for _, name, data in events(parts)] == whole


def test_a_byte_at_a_time_stamps_each_event_when_it_is_whole():
    raw = b"".join(stream(*words(2), event(**usage(2)), DONE))
    outcome = Outcome(exchange([raw[i : i + 1] for i in range(len(raw))]), 2)
    ends = [raw.index(word) + len(word) - 1 for word in (words(1)[0],)]
    ends.append(raw.index(words(1)[0], ends[0]) + len(words(1)[0]) - 1)
    assert [at // 10_000_000 for at in outcome.times_ns] == ends


def test_several_tokens_in_a_chunk():
    outcome = read(stream(event(text("a b c")), event(text("d e f", "length")), event(**usage(TOKENS)), DONE))
    assert (outcome.kind, outcome.tokens) == ("ok", [3, 3])


def test_several_events_in_one_piece():
    outcome = read([HEAD, b"".join(chunked(b"".join(words(4)), *words(2), event(**usage(TOKENS)), DONE))])
    assert outcome.kind == "ok"
    assert outcome.times_ns == [10_000_000] * TOKENS


def test_token_ids_and_running_usage_count_the_tokens_of_a_chunk():
    ids = [event({**text(), "token_ids": [1] * n}) for n in (1, 3, 2)]
    assert read(stream(*ids, event(**usage(6)), DONE)).tokens == [1, 3, 2]
    running = [event(text(), usage={"completion_tokens": n}) for n in (1, 4, 6)]
    assert read(stream(*running, DONE)).tokens == [1, 3, 2]


def delta(finish=None, usage=None, **more):
    return event({"delta": more, "finish_reason": finish}, **({"usage": usage} if usage else {}))


@pytest.mark.parametrize("first", [0, 1])
def test_a_running_usage_on_the_role_chunk_is_no_token(first):
    body = [delta(role="assistant", content="", usage={"completion_tokens": first})]
    body += [delta(content="x", usage={"completion_tokens": number}) for number in range(1, TOKENS + 1)]
    outcome = read(stream(*body, DONE))
    assert (outcome.kind, outcome.tokens, outcome.times_ns[0]) == ("ok", [1] * TOKENS, 20_000_000)


def test_a_role_only_first_chunk_is_no_token():
    body = [delta(role="assistant", content=""), *[delta(content="x")] * TOKENS, event(**usage(TOKENS)), DONE]
    outcome = read(stream(*body))
    assert outcome.times_ns[0] == 20_000_000
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, 8)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "refusal", "tool_calls"])
def test_whatever_a_delta_says_is_tokens(field):
    body = [
        delta(role="assistant"),
        *[delta(**{field: "x"})] * 4,
        *[delta(content="x")] * 2,
        event(**usage(TOKENS)),
        DONE,
    ]
    assert figures(read(stream(*body))) == ("ok", TOKENS, [1] * TOKENS, 8)


def compressed(encoding, *events):
    """A compressed stream, each event flushed as a server does."""
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: %s\r\n\r\n" % encoding)
    squeeze = zlib.compressobj(wbits=31 if encoding == b"gzip" else 15)
    parts = [squeeze.compress(part) + squeeze.flush(zlib.Z_SYNC_FLUSH) for part in events]
    return [head, *chunked(*parts, squeeze.flush())]


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_compression_that_nobody_asked_for(encoding):
    outcome = read(compressed(encoding, *words(), event(**usage(TOKENS)), DONE))
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, 8)
    assert outcome.times_ns == [10_000_000 * index for index in range(1, TOKENS + 1)]


@given(cuts=st.sets(st.integers(1, 400), max_size=30))
@settings(max_examples=20, deadline=None)
def test_any_cut_of_compressed_bytes_gives_the_same(cuts):
    raw = b"".join(compressed(b"gzip", *words(), event(**usage(TOKENS)), DONE))
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert figures(read(pieces)) == ("ok", TOKENS, [1] * TOKENS, 8)


def test_compression_that_cannot_be_undone():
    outcome = read([HEAD[:-2] + b"Content-Encoding: br\r\n\r\n", *chunked(b"\x1b\x03\x00")])
    assert outcome.kind == "bad_http" and "decompress" in outcome.message


def test_a_redirect_names_the_server():
    parts = [b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://h:1/v1\r\nContent-Length: 0\r\n\r\n"]
    outcome = read(parts)
    assert outcome.kind == "http_307" and "http://h:1/v1" in outcome.message


def test_empty_texts_are_tokens_where_the_total_says_so():
    body = [event(text("")), *words(4), event(text("", "length")), event(**usage(TOKENS)), DONE]
    outcome = read(stream(*body))
    assert (outcome.kind, outcome.tokens, outcome.times_ns[0]) == ("ok", [1] * TOKENS, 10_000_000)


def test_without_usage_chunks_are_counted_and_it_is_said():
    outcome = read(stream(*words(5), event(text("a", "length")), DONE))
    assert (outcome.kind, outcome.output_tokens, outcome.tokens_from) == ("ok", TOKENS, "chunks")


BAD = {
    "error_in_stream": (
        stream(*words(2), b'data: {"error": {"message": "engine died", "code": 500}}\n\n', DONE),
        "engine",
    ),
    "error_in_stream ": (stream(b'data: {"object": "error", "message": "engine died"}\n\n'), "engine died"),
    "error_in_stream  ": (stream(*words(2), b'event: error\ndata: "engine died"\n\n'), "engine died"),
    "http_500": (plain(500, b'{"error": {"message": "out of memory"}}'), "out of memory"),
    "http_400": (plain(400, b'{"object":"error","message":"prompt too long"}'), "prompt too long"),
    "http_422": (plain(422, b'{"detail": [{"msg": "field required"}]}'), "field required"),
    "http_503": (plain(503, b"<html>no backend</html>"), "no backend"),
    "wrong_length": (stream(*words(3), event(text("", "stop")), event(**usage(3)), DONE), "asked for 6 tokens, got 3"),
    "no_tokens": (plain(200, b'{"choices": [{"text": "not streamed"}]}', "OK"), "not streamed"),
    "bad_event": (stream(*words(2), b"data: {broken\n\n", *words(4), event(**usage(TOKENS)), DONE), "broken"),
    "cut": (stream(*words(3)), "3 of 6"),
}


@pytest.mark.parametrize("name", BAD)
def test_failures_have_a_kind_and_the_message(name):
    parts, message = BAD[name]
    outcome = read(parts)
    assert outcome.kind == name.strip()
    assert message in outcome.message


def test_an_error_body_with_status_200_is_a_failure():
    outcome = read(plain(200, b'{"error": {"message": "no such model"}}', "OK"))
    assert (outcome.kind, outcome.message) == ("error_in_stream", "no such model")


def test_a_cut_in_the_middle():
    parts = stream(*words(), event(**usage(TOKENS)), DONE)
    outcome = read(parts[:4], "cut", "the server closed the connection")
    assert (outcome.kind, outcome.output_tokens) == ("cut", 3)
    assert read(parts[:-1], "cut", "closed").kind == "ok"  # [DONE] had come


def test_a_time_out_keeps_the_tokens_that_came():
    outcome = read(stream(*words())[:3], "timeout", "no data for 1 s")
    assert (outcome.kind, outcome.output_tokens, outcome.message) == ("timeout", 2, "no data for 1 s")


@pytest.mark.parametrize("choices", [5, "x", {"a": 1}, [None], ["a"], [{"text": "a", "delta": "b"}]])
def test_json_of_another_shape_is_a_bad_event(choices):
    outcome = read(stream(*words(5), event(choices=choices), event(text("a", "length")), DONE))
    assert outcome.kind == "bad_event" and "another shape" in outcome.message


def test_json_too_deep_to_read_is_a_bad_event():
    assert read(stream(b"data: " + b"[" * 100_000 + b"\n\n", *words())).kind == "bad_event"
    assert read(plain(200, b"[" * 100_000, "OK")).kind == "no_tokens"


@pytest.mark.parametrize("number", [None, True, -1, 6.5, "6", [6], {}])
def test_a_usage_that_is_no_number_of_tokens_is_none(number):
    nonsense = {"completion_tokens": number, "prompt_tokens": number}
    outcome = read(stream(*words(5), event(text("a", "length")), event(usage=nonsense), DONE))
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, None)
    assert outcome.tokens_from == "chunks"


@pytest.mark.parametrize("ids", [5, "abc", {"a": 1}, None])
def test_token_ids_that_are_no_list_are_none(ids):
    assert read(stream(*[event({**text(), "token_ids": ids})] * TOKENS, event(**usage(TOKENS)), DONE)).kind == "ok"


@pytest.mark.parametrize(("chunks", "finish"), [(3, "stop"), (9, "length"), (9, None)])
def test_another_length_is_seen_without_usage_too(chunks, finish):
    outcome = read(stream(*words(chunks - 1), event(text("a", finish)), DONE))
    assert outcome.kind == "wrong_length"
    assert f"asked for {TOKENS} tokens, got {chunks} chunks (finish_reason {finish})" in outcome.message


def test_each_event_may_be_a_gzip_member_of_its_own():
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    outcome = read([head, *chunked(*map(gzip.compress, [*words(), event(**usage(TOKENS)), DONE]))])
    assert figures(outcome) == ("ok", TOKENS, [1] * TOKENS, 8)


def test_what_follows_a_whole_response_is_not_its_fault():
    *parts, end = stream(*words(), event(**usage(TOKENS)), DONE)
    assert figures(read([*parts, end + b"junk"])) == ("ok", TOKENS, [1] * TOKENS, 8)
    assert read([*parts, b"zz\r\n"]).kind == "bad_http"
