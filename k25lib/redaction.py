"""Keys, tokens and passwords are taken out of whatever is written down: manifests, documents, pages, logs, messages."""

import os
import re

HIDDEN = "***"
# Names that keep a secret: api_key, HF_TOKEN, db.password, DB_PASS ...; `_NOT_SECRET`: counts that read like one.
_NAME = (
    r"(?:[\w.-]{0,60}[_.-])?(?:api[ _-]?keys?|tokens?|pass(?:words?|wd|phrase)|secrets?|credentials?|signature|cookie"
    r"|authorization|(?:access|secret|private)[_-]?key)|\w{1,60}passw(?:or)?d|(?-i:(?:[A-Z0-9_]{0,60}_)?KEY)"
    r"|(?-i:[A-Z0-9_]{0,60}_(?:PASS|PWD))"
)
_NAME = f"(?:{_NAME})"
_NOT_SECRET = re.compile(
    r"(?i)(?:num|max|min|input|output|batched|prompt|completion|total|special|new|cached|stop)[\w-]*tokens?$|tokens$"
)
# Values that are no secret under any name; variables of this process whose values are hidden wherever they stand.
_NOTHING = {"", "none", "null", "true", "false", "[]", "{}", HIDDEN}
_ENVIRONMENT = re.compile(r"(?i)(?:^|_)(?:api_?keys?|token|password|passwd|secret|(?:access|secret)_key)$")
# Secrets that show by their own form: tokens of known services, JWTs, private keys.
_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.S,
)
# http://user:password@host; ?key=...; `Authorization: Bearer ...`; `curl -u user:password`
_URL_LOGIN = re.compile(r"(\b\w[\w+.-]{0,20}://)[^\s/?#'\"]+@")
_URL_QUERY = re.compile(r"(?i)([?&](?:key|sig|auth|code)=)[^&\s'\"]+")
_HEADER = re.compile(
    r"(?i)\b((?:authorization|cookie)\\*['\"]?\s*[:=]\s*\\*['\"]?(?:(?:bearer|basic|token|digest)\s+)?)[^\s'\"][^'\"\r\n}]*"
    r"|\b((?:bearer|basic)\s+)(?=[\w.~+/=-]*[\d+/=._-])[\w.~+/=-]{6,}"
)
_LOGIN_FLAG = re.compile(
    r"\b((?:curl|wget)\b[^\n|;]{0,500}?\s(?:-u|--user)[ =]|sshpass\s+-p\s*|docker login\b[^\n|;]{0,500}?\s-p[ =])"
    r"((['\"\\]{2,})[^\n]{1,500}?\3|'[^']*'|\"[^\"]*\"|\S+)"
)
# Values after a secret name inside a quoted command, where quotes are doubled or escaped; then a whole quoted word.
_RUN = r"((?!''(?!['\"\\])|\"\"(?!['\"\\]))['\"\\]{2,})"  # a quote inside a quoted command: '"'"' or \"
_NESTED = re.compile(rf"(?i)(?<![\w-])(--{_NAME}|{_NAME}(?=\s*[=:]))(\s*[=:]\s*|\s+){_RUN}([^\n]{{1,500}}?)\3")
_WHOLE_ASSIGN = re.compile(rf"(?i)(?<![\w-])(['\"\\]+)({_NAME})=([^\n]{{1,500}}?)\1")  # 'NAME=two words'
_QUOTED = r"'[^']*'(?:\"'\"'[^']*')*|\"[^\"]*\""  # a shell's word; 'it'"'"'s' is one
# `--api-key VALUE`; ["--api-key", "VALUE"] as a list prints; NAME=VALUE, name: VALUE, "name": "value"
_FLAG = re.compile(
    rf"(?i)(?<![\w-])(--{_NAME})((?:=|\s+)(?:{_QUOTED}|[^\s\"']+)(?: +(?!-|\d?[<>])[^\s\"',;|&<>)\]}}]+)*)"
)
_LIST_FLAG = re.compile(rf"(?i)(['\"])(--{_NAME})\1(\s*,\s*)(['\"])(?!-)(.*?)\4")
_ASSIGN = re.compile(
    rf"(?i)(?<![\w-])(\\*['\"]?)({_NAME})\1(\s*[=:]\s*)"
    rf"('[^'\n]*'(?:\"'\"'[^'\n]*')+|\[[^\]\n]*\]|\([^)\n]*\)|(\\*['\"])[^\n]*?\5|[^\s,;&'\"\])}}]+)"
)


def redact(text):
    """The text without its secrets: known forms of tokens, values of secret flags, variables, keys, headers and URLs,
    and the values that this process's own environment keeps under such names."""
    for value in _own_secrets():
        text = text.replace(value, HIDDEN)
    text = _FORMS.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(lambda m: f"{m[1] or m[2]}{HIDDEN}", text)
    text = _LOGIN_FLAG.sub(rf"\1{HIDDEN}", text)
    text = _NESTED.sub(lambda m: m[0] if _harmless(m[1], m[4]) else f"{m[1]}{m[2]}{m[3]}{HIDDEN}{m[3]}", text)
    text = _WHOLE_ASSIGN.sub(lambda m: m[0] if _harmless(m[2], m[3]) else f"{m[1]}{m[2]}={HIDDEN}{m[1]}", text)
    text = _LIST_FLAG.sub(
        lambda m: m[0] if _harmless(m[2], m[5]) else f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}{HIDDEN}{m[4]}", text
    )
    text = _FLAG.sub(lambda m: m[0] if _harmless(m[1], m[2][1:]) else f"{m[1]}{m[2][0]}{HIDDEN}", text)
    return _ASSIGN.sub(_assigned, text)


def redact_tree(value, name=""):
    """A dict, list or string, all the way down, without secrets; what a secret name holds goes, whatever it is."""
    if isinstance(value, dict):
        return {key: redact_tree(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return _words([redact_tree(inner, name) for inner in value])
    if name and value is not None and is_secret(name) and not isinstance(value, bool | int | float):
        return HIDDEN if str(value).lower() not in _NOTHING else value
    return redact(value) if isinstance(value, str) else value


def is_secret(name):
    """Whether a flag, variable or key of this name holds a secret: `--api-key`, not `--max-num-batched-tokens`."""
    return bool(re.fullmatch(rf"(?i)-*{_NAME}", name)) and not _NOT_SECRET.search(name)


def _words(words):
    """A list's items with the text between a secret flag and the next flag hidden; other lists stay as they are."""
    made, hiding = [], False
    for word in words:
        flag = isinstance(word, str) and word.startswith("-")
        made.append(HIDDEN if hiding and isinstance(word, str) and not flag else word)
        hiding = is_secret(word) if flag else hiding
    return made


def _own_secrets():
    found = {v for k, v in os.environ.items() if _ENVIRONMENT.search(k) and len(v) >= 6 and v.lower() not in _NOTHING}
    return sorted(found, key=len, reverse=True)


def _harmless(name, value):
    return not is_secret(name) or value.strip(" '\"\\").lower() in _NOTHING


def _assigned(match):
    quote, name, sign, value, edge = match.groups(default="")
    prose = ":" in sign and not quote and value[0] not in "'\"[(\\"  # such as "token: the smallest unit"
    if _harmless(name, value) or (prose and not (re.search(r"\d", value) and len(value) >= 8)):
        return match[0]
    return f"{quote}{name}{quote}{sign}{edge}{HIDDEN}{edge}"
