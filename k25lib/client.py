"""vLLM's HTTP API as the workbook needs it: readiness, identity, metrics, the profiler's two calls."""

import json
import math
import os
import re
from urllib.parse import urlsplit

import requests

from k25lib.errors import K25Error, UsageError

_HERE = re.compile(r"(.+\.)?localhost|127(\.\d+){1,3}|0\.0\.0\.0|::1?")


class ServerDown(K25Error):
    """Nothing answers at the URL."""


class NotReady(K25Error):
    """A server answers, but it can't make a token (yet)."""


class NotVllm(K25Error):
    """Something answers at the URL, but it does not speak vLLM's API."""


class ProfilerMissing(K25Error):
    """The server runs without a profiler (404 on /start_profile)."""


def profiler_config(traces):
    """The configuration that vLLM's torch profiler wants, writing to the folder `traces`, as a dict."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }


PROFILER_FLAG = f"--profiler-config '{json.dumps(profiler_config('/ABSOLUTE/DIR'), separators=(',', ':'))}'"


def normalise_url(url):
    """The server's base URL: scheme added, trailing `/`, `/v1` and endpoint removed. Raises UsageError for no URL."""
    url = url.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        valid = valid and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, brackets that don't close
        valid = False
    if not valid:
        raise UsageError(f"{url!r} is no server URL: give something like http://127.0.0.1:8000")
    return re.sub(r"/*(/v1(/(chat/)?completions|/models)?)?/*$", "", url)


def key_of_environment():
    """The API key in K25_API_KEY, None if there is none. Raises UsageError for one that no HTTP header can hold."""
    key = os.environ.get("K25_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("K25_API_KEY holds characters that no HTTP header can: set it again")
    return key or None


class Client:
    """One server. Every method raises a one-line K25Error; the API key comes from K25_API_KEY unless given."""

    def __init__(self, url, api_key=None, timeout_s=10.0):
        self.url = normalise_url(url)
        self.timeout_s = timeout_s
        self.session = requests.Session()
        self.session.trust_env = not _HERE.fullmatch(urlsplit(self.url).hostname)  # no proxy to this machine
        self.session.verify = os.environ.get("SSL_CERT_FILE") or True
        key = api_key or key_of_environment()
        if key:
            self.session.headers["Authorization"] = f"Bearer {key}"
            self.session.auth = lambda request: request  # neither a login in the URL nor one of ~/.netrc replaces it

    def _call(self, method, path, timeout_s=None, **more):
        try:
            answer = self.session.request(method, self.url + path, timeout=timeout_s or self.timeout_s, **more)
        except requests.exceptions.ConnectTimeout:
            raise ServerDown(f"{self.shown_url} does not accept connections: is the address right?") from None
        except requests.exceptions.Timeout:
            raise NotReady(
                f"{self.shown_url}{path} did not answer within {timeout_s or self.timeout_s:g} s: "
                "is the server stuck or busy?"
            ) from None
        except requests.exceptions.ProxyError:
            raise ServerDown(
                f"the proxy of this environment does not reach {self.shown_url}: "
                f"set NO_PROXY={urlsplit(self.url).hostname} to go without it, as the load does"
            ) from None
        except requests.exceptions.SSLError as error:
            raise ServerDown(f"{self.shown_url}: {tls_reason(error)}") from None
        except requests.exceptions.RequestException as error:
            raise ServerDown(
                f"no server answers at {self.shown_url} ({_cause(error)}): start it, or give another URL"
            ) from None
        if answer.status_code in (401, 403):
            raise K25Error(f"{self.shown_url} asks for an API key: set K25_API_KEY in the environment")
        return answer

    @property
    def shown_url(self):
        """The URL without credentials, for messages and manifests."""
        parts = urlsplit(self.url)
        return self.url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)

    def _json(self, path):
        answer = self._call("GET", path)
        if answer.status_code in (502, 503, 504):
            raise NotReady(
                f"{self.shown_url}: status {answer.status_code}; a proxy answers, the server behind it not yet"
            )
        try:
            answer.raise_for_status()
            return answer.json()
        except (requests.exceptions.HTTPError, ValueError):
            raise NotVllm(
                f"{self.shown_url} answers, but not as vLLM does (GET {path}: status {answer.status_code}): "
                "is this the right port?"
            ) from None

    def health(self):
        """True if the engine is not dead; it says nothing of making tokens. Raises ServerDown if nothing answers."""
        return self._call("GET", "/health").status_code == 200

    def version(self):
        """The server's version string, or '' if the server does not tell (another engine with vLLM's API)."""
        answer = self._call("GET", "/version")
        try:
            return str(answer.json()["version"]) if answer.ok else ""
        except (ValueError, KeyError, TypeError):
            return ""

    def models(self):
        """The served models: a list of dicts with at least `id` (and `max_model_len` where the server tells)."""
        body = self._json("/v1/models")
        models = body.get("data") if isinstance(body, dict) else None
        whole = isinstance(models, list) and all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in models)
        if not whole:
            raise NotVllm(f"{self.shown_url} answers, but /v1/models is not a list of models: is this the right port?")
        return models

    def model(self, wanted=""):
        """The id of the model to measure: `wanted` if it is served, the first one if nothing is wanted."""
        ids = [m["id"] for m in self.models()]
        if not ids:
            raise NotReady(f"{self.shown_url} serves no model yet")
        if wanted and wanted not in ids:
            raise UsageError(
                f"{self.shown_url} serves {', '.join(ids)}, not {wanted!r}: set server.model to one of them"
            )
        return wanted or ids[0]

    def one_token(self, model, timeout_s=120.0):
        """Make one token and return its text: the only proof that the server can."""
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        answer = self._call("POST", "/v1/completions", timeout_s=timeout_s, json=body)
        try:
            answer.raise_for_status()
            return answer.json()["choices"][0].get("text", "")
        except (requests.exceptions.HTTPError, ValueError, LookupError, AttributeError, TypeError):
            raise NotReady(
                f"{self.shown_url} can't make a token (status {answer.status_code}): {_short(answer.text)}"
            ) from None

    def ready(self, model=""):
        """The model's id once the server is healthy, lists it, and has made one token; raises what is missing."""
        if not self.health():
            self.models()  # something that is no vLLM says so here
            raise NotReady(f"{self.shown_url}: the engine is not healthy (GET /health is not 200); look at its log")
        served = self.model(model)
        self.one_token(served)
        return served

    def metrics(self):
        """The server's metrics: name -> list of (labels, value). Scrape at most once a second: it delays tokens."""
        from prometheus_client.parser import text_string_to_metric_families

        answer = self._call("GET", "/metrics")
        if not answer.ok:
            return {}
        samples = {}
        try:
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    if math.isfinite(sample.value):  # NaN is Prometheus' word for nothing known
                        samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, LookupError, TypeError):
            return {}  # not Prometheus text: this server has no metrics
        return samples

    def running(self):
        """Requests running and waiting now, as (running, waiting); None where the server has no such metric."""
        samples = self.metrics()

        def total(name):
            return sum(value for _, value in samples[name]) if name in samples else None

        return total("vllm:num_requests_running"), total("vllm:num_requests_waiting")

    def has_profiler(self, timeout_s=900.0):
        """True if the server has a profiler. Asking ends a session that was cut off (0.26 would answer 200 to a second
        start); without one, /stop_profile is 200 and does nothing, without a profiler 404."""
        return self._call("POST", "/stop_profile", timeout_s=timeout_s).status_code != 404

    def require_profiler(self, timeout_s=900.0):
        """Raises ProfilerMissing, with the flag to add, if the server has none."""
        if not self.has_profiler(timeout_s):
            raise self._no_profiler()

    def _no_profiler(self):
        return ProfilerMissing(
            f"{self.shown_url} runs without a profiler: start it with {PROFILER_FLAG} "
            "(vLLM before 0.20: the environment variable VLLM_TORCH_PROFILER_DIR)"
        )

    def start_profile(self):
        """Start the profiler. A 409 means that it runs already (0.32; older versions answer 200 twice)."""
        return self._profile("/start_profile", 60.0)

    def stop_profile(self, timeout_s=900.0):
        """Stop the profiler; the call returns when the files are written, which takes up to minutes."""
        return self._profile("/stop_profile", timeout_s)

    def _profile(self, path, timeout_s):
        answer = self._call("POST", path, timeout_s=timeout_s)
        if answer.status_code == 404:
            raise self._no_profiler()
        if answer.status_code == 409:
            raise K25Error(f"{self.shown_url}: somebody else has started the profiler; POST /stop_profile ends it")
        if not answer.ok:
            raise K25Error(f"{self.shown_url}: POST {path} failed ({answer.status_code}): {_short(answer.text)}")


def tls_reason(error):
    """Why a TLS connection failed, and what to do about it, in one line."""
    found = re.search(r"certificate verify failed: ([^(]*)", str(error))
    if found is None:
        return f"TLS failed ({_short(error)}): does the server speak https?"
    return (
        f"its certificate is not accepted ({found[1].strip(' .')}): set SSL_CERT_FILE to a file that holds it, "
        "and use the name that it was made for"
    )


def _cause(error):
    text = str(error)
    for words in ("Connection refused", "Name or service not known", "No route to host", "Connection reset"):
        if words in text:
            return words.lower()
    return _short(text)


def _short(text, length=160):
    line = " ".join(str(text).split())
    return line if len(line) <= length else line[: length - 1] + "…"
