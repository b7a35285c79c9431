# syntax=docker/dockerfile:1
# One image for web, reconciler and worker. torch brings its own CUDA libraries, so the base is plain Python.
FROM python:3.13-slim AS build
WORKDIR /app
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The largest and least often changed layer first.
RUN pip install torch==2.13.0
COPY requirements.lock ./
RUN pip install --no-deps --require-hashes -r requirements.lock
COPY . .
RUN pip install --no-deps --no-build-isolation -e .

FROM python:3.13-slim
# Compiled blocks: torch's compiler has g++ make their code on a CPU, and Triton builds its launcher with gcc on a card. The base
# image has Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --home-dir /var/lib/headroom headroom \
    && install -d -o headroom -g headroom -m 0700 /var/lib/headroom
COPY --from=build /venv /venv
COPY --from=build /app /app
ENV PATH=/venv/bin:$PATH HEADROOM_HOME=/var/lib/headroom DJANGO_SETTINGS_MODULE=webapp.settings PYTHONUNBUFFERED=1
WORKDIR /app
USER headroom
VOLUME /var/lib/headroom
EXPOSE 8400
CMD ["python", "-m", "webapp.server", "--host", "0.0.0.0"]
