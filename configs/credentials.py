"""Credentials among settings, by their names and by the look of values.

Settings are stored with the run and shown by MLflow and Prefect, so no run begins with one. What is
said of one never repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from pydantic import BaseModel

from configs.cluster import JsonObject, KubernetesPods
from configs.environment import SECRET

# Of variables, parameters and headers, beside those of configs.environment.
NAME = re.compile(
    r"pass(wd|word|phrase|code)?$|pwd$|(^|[_-])(auth|authorization|bearer|cookies?|sas|dsn|pat|"
    r"jwt|signature)($|[_-])|(^|[_-])api[_-]?key|connection_?string|(^|[_-])sas_?(url|uri)$",
    re.IGNORECASE,
)
NO_NAME = re.compile(
    r"(by|com|tres|sur|en|(^|[_-])(one|first|second|single))[_-]?pass$", re.IGNORECASE
)
KEY = re.compile(r"key$", re.IGNORECASE)
OBJECTS = (JsonObject, list[JsonObject])  # settings that are written as Kubernetes has them
# Of Kubernetes' own objects: what these hold is the name of something.
KUBERNETES_NAMES = {"key", "topologyKey", "secretName", "secretProviderClass", "imagePullSecrets"}
HARMLESS_HEADERS = {"accept", "accept-encoding", "content-type", "user-agent", "host", "referer"}
RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[\w+/=.~-]{16,}")  # a token's look
WORD = r"[A-Za-z0-9._~+/=-]"
VALUES = (
    (
        re.compile(r"[a-z][a-z0-9+.-]*://[^\s/:@]*:(?!\d*/)[^\s@]+@", re.I),
        "an address with a password",
    ),
    (
        re.compile(
            r"[?&;](sig|signature|x-(amz|goog)-(signature|credential|security-token)|(access_|auth_)?"
            r"token|api_?key|key|password|secret|sas)=[^&\s]{6,}",
            re.I,
        ),
        "an address with a signature or a key",
    ),
    (re.compile(rf"\b(bearer|basic|token)\s+(?={WORD}*\d){WORD}{{12,}}", re.I), "a header's token"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), "a private key"),
    (re.compile(r"\b(AccountKey|SharedAccessSignature)=", re.I), "a connection string with a key"),
    (
        re.compile(
            r"(?<![A-Za-z0-9])(sk-(?=[\w-]*\d)[\w-]{16,}|(AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{30,}|"
            r"github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|"
            r"AIza[\w-]{35}|pn[ub]_\w{30,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.)"
        ),
        "a service's key",
    ),
)
ASSIGNED = re.compile(r"(?<![\w$])([A-Za-z_]\w*)=(?=[\"']?(?![$`])([^\s\"',;&]{6,}))")


def secret_name(name: str, value: object) -> bool:
    """Whether a variable, parameter, header or label of that name and value is a credential's."""
    name = name.rpartition("/")[2]  # labels and annotations begin with whose they are
    if not isinstance(value, str) or not value:
        return bool(SECRET.search(name)) and not isinstance(value, (bool, int, float, Mapping))
    if SECRET.search(name) or (NAME.search(name) and not NO_NAME.search(name)):
        return True
    # A lower-case key may be a column's or a field's: its value tells.
    return bool(KEY.search(name)) and (name.isupper() or bool(RANDOM.fullmatch(value)))


def secret_value(text: str) -> str:
    """What credential a text has in it, in words; empty where it looks like none."""
    for pattern, what in VALUES:
        if pattern.search(text):
            return what
    for match in ASSIGNED.finditer(text):
        name, value = match.groups()
        if secret_name(name, value):
            return f"a value of {name}"
    return ""


def _within(place: str, value: object, header: bool = False) -> Iterator[tuple[str, str]]:
    """header: whether names at this place are those of headers."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            kubernetes = isinstance(value, KubernetesPods) and field.annotation in OBJECTS
            look = _within_object if kubernetes else _within
            yield from look(f"{place}.{name}", getattr(value, name))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            name, below = str(key), f"{place}.{key}"
            ours = isinstance(inner, BaseModel)
            headers = "header" in name.lower()
            if (header and name.lower() not in HARMLESS_HEADERS) or (
                not ours and headers and isinstance(inner, str)
            ):
                yield below, "is a header"
            elif not ours and secret_name(name, inner):
                yield below, "looks like a credential by its name"
            else:
                yield from _within(below, inner, headers)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _within(f"{place}.{number}", inner)
    elif isinstance(value, str) and (what := secret_value(value)):
        yield place, f"holds {what}"


def _within_object(place: str, value: object) -> Iterator[tuple[str, str]]:
    """The same of an object of Kubernetes, whose variables and headers are {name: …, value: …}."""
    if isinstance(value, Mapping):
        name, text = value.get("name"), value.get("value")
        if isinstance(name, str) and text is not None and secret_name(name, text):
            yield f"{place}.value", f"is that of {name}, which looks like a credential by its name"
            return
        for key, inner in value.items():
            if key not in KUBERNETES_NAMES and secret_name(str(key), inner):
                yield f"{place}.{key}", "looks like a credential by its name"
            else:
                yield from _within_object(f"{place}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _within_object(f"{place}.{number}", inner)
    else:
        yield from _within(place, value)


def credential_sentence(settings: BaseModel) -> str:
    """What a person is told of the first one; empty where there is none."""
    names = type(settings).model_fields
    places = chain.from_iterable(_within(name, getattr(settings, name)) for name in names)
    for place, why in places:
        return (
            f"{place} {why}, and settings are stored with the run, in MLflow and in Prefect. Remove "
            "it from the settings, and give it by an environment variable that your code or the "
            "library reads: on Kubernetes by a Secret (cluster.kubernetes.secret), elsewhere as "
            "docs/security.md says."
        )
    return ""
