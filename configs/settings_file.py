"""Files of settings that people write in YAML: recipes, a team's deployments, shared values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from configs.overrides import ConfigError
from configs.yaml_text import KeyTwice, read_yaml


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file, by name; ConfigError says in one sentence why it holds none."""
    try:
        settings = read_yaml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Give the path of a YAML file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Give the path of a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.reader.ReaderError):
        raise ConfigError(f"{path} is no text. Give a YAML file, in UTF-8.") from None
    except KeyTwice as error:
        raise ConfigError(f"{path}: {error}. Remove one.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_why(error)}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings: its top level must be key: value lines.")
    if wrong := next((name for name in settings if not isinstance(name, str)), None):
        raise ConfigError(f"{path}: {wrong!r} is no name of a setting. Write it as a word.")
    return settings


def _why(error: yaml.YAMLError) -> str:
    """What is wrong, and in which line where that is known."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    place = f"in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if "'\\t'" in (error.problem or ""):
        return f"{place} is a tab. Indent with spaces"
    return f"{error.problem or error.context}, {place}"
