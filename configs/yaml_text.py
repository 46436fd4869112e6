"""YAML of a person's settings, in which no key may stand twice: YAML itself takes the last one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class KeyTwice(ValueError):
    """A key stands twice in one mapping; says which, and in which lines."""


def read_yaml(text: str) -> Any:
    """The value of a YAML document. Raises KeyTwice, yaml.YAMLError."""
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
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
