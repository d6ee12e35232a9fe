"""Write YAML by PyYAML, which is imported only here, and only when a job file is asked for."""

from __future__ import annotations

from typing import Any

from meshwright.extras import check_installed


def yaml_text(value: object) -> str:
    r"""Return a value of mappings, lists, texts and numbers as a YAML document, with a final newline.

    Raises:
        InputError: PyYAML is not installed.

    >>> print(yaml_text({"name": "x", "args": ["a b", 1], "script": "one\ntwo\n"}), end="")
    name: x
    args:
    - a b
    - 1
    script: |
      one
      two
    """
    check_installed("jobs", ["yaml"], "this kind of job file")
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value.rstrip("\n") else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=False)
