# Servers and workers of docker-compose.yml. `cpu` is the default; `gpu` has vLLM beside it, in an environment of its own.
FROM python:3.11.13-slim-bookworm AS wheel
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY flows flows
COPY tasks tasks
COPY storage storage
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.13-slim-bookworm AS cpu
ARG EXTRAS=stack,ray
# Such as PyTorch's index of CPU wheels, which are a tenth in size.
ARG EXTRA_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} \
    "$(echo /wheels/grpoflow-*.whl)[$EXTRAS]"
RUN useradd --uid 10001 --home-dir /var/lib/grpoflow --create-home grpoflow
USER 10001
WORKDIR /var/lib/grpoflow
CMD ["grpoflow", "--help"]

# actor_rollout_ref.rollout.engine_python=/opt/vllm/bin/python: vLLM wants another fastapi than Prefect.
FROM cpu AS gpu
USER 0
COPY pyproject.toml /tmp/pyproject.toml
RUN python -m venv /opt/vllm && python -c "import tomllib; \
    print(*tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']['optional-dependencies']['vllm'], sep='\n')" \
    > /tmp/vllm.txt && /opt/vllm/bin/pip install --no-cache-dir -r /tmp/vllm.txt
USER 10001
