"""Settings are stored, shown and logged, so credentials are refused where they could slip in."""

import re
from collections.abc import Iterable, Mapping

SECRET = re.compile(
    r"secret|passw(or)?d|credential|(private|access|api|account)_?key|^key$|(^|_)token($|_)",
    re.IGNORECASE,
)
IN_ADDRESS = re.compile(r"^[a-z0-9+.-]+://[^/@]*:[^/@]+@", re.IGNORECASE)


def secret_keys(settings: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    """Dotted names of the settings that look like credentials, groups within groups included."""
    for name, value in settings.items():
        if SECRET.search(name):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from secret_keys(value, f"{prefix}{name}.")


def refuse_secrets(where: str, settings: Mapping[str, object], remedy: str) -> None:
    """ValueError when a setting's name looks like a credential's; the value is not repeated."""
    for name in secret_keys(settings):
        raise ValueError(
            f"{where}.{name} looks like a credential, and settings are stored with the run, in "
            f"MLflow and in Prefect. Remove it; {remedy}"
        )


def refuse_password(where: str, address: str) -> None:
    """ValueError when an address holds a password."""
    if IN_ADDRESS.match(address):
        raise ValueError(
            f"{where} holds a password, and settings are stored with the run, in MLflow and in "
            "Prefect. Take it out of the address and give it by the environment."
        )
