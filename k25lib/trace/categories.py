"""Kernel name -> category, by the ordered rules of categories.toml and the user's own in front of them."""

import re
import tomllib
from functools import cache
from pathlib import Path

from k25lib.errors import UsageError

GROUPS = ("fine", "operation", "role")
ANY_NAMES = ("qjz", "xkw")  # what names both, names any
COMMUNICATION = ("allreduce_nccl", "allreduce_custom", "other_comm")


class Categories:
    """Ordered rules. `category(name)` is a `fine` category or "unknown"; `operation(name)` a collective or None."""

    def __init__(self, user_file=None):
        own = tomllib.loads(Path(__file__).with_name("categories.toml").read_text())
        extra = _load(user_file) if user_file else {}
        self._rules = [(r["category"], _regex(r)) for r in [*extra.get("rule", []), *own["rule"]]]
        self._collectives = [(r["operation"], _regex(r)) for r in [*extra.get("collective", []), *own["collective"]]]
        self._groups = {g: {**own["groups"][g], **extra.get("groups", {}).get(g, {})} for g in own["groups"]}
        self.category = cache(self._category)

    def _category(self, name):
        name = name.lower()
        return next((category for category, regex in self._rules if regex.search(name)), "unknown")

    def fold(self, category, group):
        """The category of a published grouping ("operation", "role") that a fine one belongs to."""
        if group == "fine":
            return category
        return self._groups[group].get(category, self._groups[group]["default"])

    def operation(self, name):
        """Operation of a communication kernel ("allreduce", "allgather", ...), or None for other kernels."""
        if self.category(name) not in COMMUNICATION:
            return None
        if self.category(name) != "other_comm":
            return "allreduce"
        name = name.lower()
        return next((operation for operation, regex in self._collectives if regex.search(name)), "other_comm")


def _regex(rule):
    """Case is ignored by lowering both sides, which compiles and runs in half the time of re.IGNORECASE."""
    return re.compile(re.sub(r"\\.|[A-Z]+", lambda m: m[0] if m[0][0] == "\\" else m[0].lower(), rule["pattern"]))


def _load(path):
    try:
        rules = tomllib.loads(Path(path).read_text())
        for kind, what in (("rule", "category"), ("collective", "operation")):
            for entry in rules.get(kind, []):
                regex = _regex(entry)
                if regex.search("") or all(regex.search(name) for name in ANY_NAMES):
                    raise UsageError(
                        f"{path}: the pattern {entry['pattern']!r} matches any name; make it name a kernel"
                    )
                if not entry[what] or not isinstance(entry[what], str):
                    raise KeyError(what)
        for group, folds in rules.get("groups", {}).items():
            if group not in GROUPS or not all(isinstance(fold, str) and fold for fold in folds.values()):
                raise UsageError(
                    f"{path}: [groups.{group}] names categories' folds; groups are {', '.join(GROUPS[1:])}"
                )
    except OSError as error:
        raise UsageError(f"cannot read the rules in {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, re.error) as error:
        raise UsageError(f"{path} is not a file of rules: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{path}: each [[rule]] needs a category and a pattern, each of groups a table") from None
    return rules
