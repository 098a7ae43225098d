"""What a check of `grpoflow doctor` says, and how secrets stay out of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal
from urllib.parse import unquote, urlsplit

Status = Literal["ok", "warn", "error", "skipped"]

SECRET_VARIABLES = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
    "PGPASSWORD",
    "HF_TOKEN",
)

HIDDEN = "***"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        name: what was looked at; a part of it behind a slash.
        status: ok; warn: works, but not as it should, or not known to work; error: a run would fail; skipped: not
            looked at, for the reason that `found` gives.
        found: what is there.
        advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return asdict(self)


def masked(uri: str) -> str:
    """A URI without what could be a secret: user information, and the values of its query."""
    uri = re.sub(r"(?<=//)[^/?#]*@", f"{HIDDEN}@", uri)
    return re.sub(r"(?<=[?&])([^=&#]+)=[^&#]*", rf"\1={HIDDEN}", uri)


def secrets_of(uris: Iterable[str | None]) -> list[str]:
    """Texts that must not be shown, longest first: from the user information of URIs, and from the environment."""
    found = {os.environ.get(name, "") for name in SECRET_VARIABLES}
    for uri in filter(None, uris):
        for match in re.finditer(r"(?<=//)([^/?#]*)@", uri):
            user, _, password = match[1].partition(":")
            secret = password or user
            found |= {secret, unquote(secret), match[1]}
        found |= set(re.findall(r"[?&][^=&#]+=([^&#]+)", uri))
    return sorted((secret for secret in found if len(secret) >= 3), key=len, reverse=True)


def without_secrets(finding: Finding, secrets: Iterable[str]) -> Finding:
    """The same finding with every secret hidden: a library's message may repeat the URI it was given."""

    def hidden(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return re.sub(r"(?<=://)[^\s/?#@]+@", f"{HIDDEN}@", text)

    return replace(finding, found=hidden(finding.found), advice=hidden(finding.advice))


def address_and_login(uri: str) -> tuple[str, str | None]:
    """A server's address without user information, and that information as `user:password`; None: it has none."""
    parts = urlsplit(uri)
    login, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl().rstrip("/"), unquote(login) if at else None
