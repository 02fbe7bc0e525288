"""What a vLLM server's log says while it starts: the stage it is in, and why it died."""

import re

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL|WARNING) \S+ \S+ (?:\[[^\]]*\] ?)?)?")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*|.*\berror: .*|Killed\b.*|Aborted\b.*)")
_FOLLOWS = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError")


def last_error(text):
    """The last error that a log quotes, in one line; '' if there is none.

    An error that only says that another process failed first gives way to that other process's error.
    """
    errors = []
    for line in re.split(r"[\r\n]+", text):
        line = _PREFIX.sub("", line).strip()
        if _ERROR.match(line):
            errors.append(line)
    own = [line for line in errors if not _FOLLOWS.search(line)]
    return (own or errors or [""])[-1][:300]


_STAGES = (  # the last one that the log shows is the stage that the server is in
    (r"non-default args|Resolved architecture", "reading the configuration"),
    (r"Initializing a V\d LLM engine|world_size=", "starting the engine"),
    (r"Starting to load model", "loading weights"),
    (r"Model loading took|Loading weights took", "weights loaded"),
    (r"torch\.compile took|Compiling a graph", "compiling"),
    (r"Capturing CUDA graphs", "capturing CUDA graphs"),
    (r"init engine", "engine ready"),
    (r"Application startup complete", "waiting for the first token"),
)


def stage(text):
    """The stage that a start-up log has reached, in a few words."""
    reached = "starting the interpreter"
    for pattern, name in _STAGES:
        if re.search(pattern, text):
            reached = name
    return reached
