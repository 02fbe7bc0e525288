"""Reads a model's config.json: where its text model is, which family it is of, how its weights are stored."""

import json
import tomllib
from pathlib import Path

from k25lib.errors import K25Error, UsageError

BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # what older tools write the weights' in


class Config:
    """The text part of a config.json, which multimodal wrappers nest under `text_config`."""

    def __init__(self, raw, overrides=None):
        if not isinstance(raw, dict):
            raise UsageError("config.json must hold a JSON object")
        nested = raw.get("text_config")
        self.text = {**(nested if isinstance(nested, dict) else raw), **(overrides or {})}
        self.prefix = "language_model." if isinstance(nested, dict) else ""
        self.architectures = [name for name in (_first(raw), _first(self.text)) if name]
        self.architecture = self.architectures[0] if self.architectures else "none named"
        self.model_type = str(self.text.get("model_type"))
        named = ((c, key) for key in ("quantization_config", "compression_config") for c in (self.text, raw))
        self.quantization = next((c[key] for c, key in named if c.get(key)), None)
        self.dtype = next(
            (str(c[key]) for c in (self.text, raw) for key in ("dtype", "torch_dtype") if c.get(key)), "bfloat16"
        ).removeprefix("torch.")

    def get(self, key):
        """The value as it stands, or None where it is absent or null."""
        return self.text.get(key)

    def number(self, key, default=0, least=0):
        """A dimension that may be absent; K25Error where it is there and no whole number of at least `least`."""
        value = self.text.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least else "whole number"
            raise K25Error(f"config.json has {key}={value!r}; it must be a {kind}")
        return value

    def stated(self, key):
        """A dimension that may be null (0) and not absent: what an absent one means differs from family to family."""
        if key not in self.text:
            raise K25Error(f"config.json lacks {key!r}, which {self.architecture} needs")
        return self.number(key)

    def says(self, *words):
        """Whether the architecture or the model_type has one of the words in its name."""
        names = " ".join([*self.architectures, self.model_type]).lower()
        return any(word in names for word in words)

    def numbers(self, key):
        """A list of whole numbers that may be absent, such as the layers that are dense."""
        value = self.text.get(key) or []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise K25Error(f"config.json has {key}={value!r}; it must be a list of whole numbers")
        return value

    def need(self, key):
        """A dimension that the family cannot do without; K25Error where it is absent or no positive whole number."""
        if self.text.get(key) is None:
            raise K25Error(f"config.json lacks {key!r}, which {self.architecture} needs")
        return self.number(key, least=1)

    def family(self):
        """Name of the builder that knows this architecture; K25Error that names the architecture otherwise."""
        families = tomllib.loads((Path(__file__).parent / "families.toml").read_text())
        for name, family in families.items():
            by_type = not _first(self.text) and self.model_type in family["model_types"]  # of a nested config
            if by_type or set(self.architectures) & set(family["architectures"]):
                return name
        known = ", ".join(sorted(a for family in families.values() for a in family["architectures"]))
        raise K25Error(
            f"architecture {self.architecture} (model_type {self.model_type}) is not of a known family; known: {known}"
        )


def _first(config):
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def read_config(path, overrides=None):
    """Read `path` (a config.json, or the model folder that holds one) into a Config."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is no valid JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{file} is no model's config: it is nested too deeply") from None
    config = Config(raw, overrides)
    beside = next((name for name in BESIDE if file.with_name(name).is_file()), None)
    if beside and not config.quantization:
        raise K25Error(
            f"{file} says nothing of how the weights are stored, {beside} beside it may: put that into config.json as "
            "quantization_config (with its quant_method), or take the config.json alone into a folder"
        )
    return config
