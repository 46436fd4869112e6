"""YAML of a person's settings, which are texts, numbers, lists and groups, as in JSON.

No key may stand twice: YAML itself takes the last one. A date is the text that it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import yaml


class KeyTwice(ValueError):
    """A key stands twice in one mapping; says which, and in which lines."""


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises KeyTwice, yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except KeyTwice:
        raise
    except (ValueError, KeyError) as error:  # a number without digits, a tag and another value
        raise yaml.YAMLError(str(error)) from None
    except RecursionError:
        raise yaml.YAMLError("its groups are too deep") from None


KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    # The entry of None refuses a tag that has none of its own.
    yaml_constructors: ClassVar = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in KINDS
    }
    yaml_implicit_resolvers = {  # noqa: RUF012 (the stubs have it of an instance)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # the stubs' type is wrong
        """As read, before merges (`<<`) put other mappings' keys beside its own."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise KeyTwice(
                    f"the key {key.value} stands twice in one group, in line {lines[name]} and in "
                    f"line {line}"
                )
            lines[name] = line
        return node
