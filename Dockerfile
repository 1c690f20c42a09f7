# `sparsefl` on a CPU:
#
#   docker build -t sparsefl .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" sparsefl fit --config quickstart
#
# Run folders, data and your own modules are in /work, the folder that is mounted.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY lightning_sparsefl lightning_sparsefl
COPY configs configs
COPY callbacks callbacks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.12-slim
# For a GPU, build with --build-arg INDEX= , which takes torch with CUDA from the default index.
ARG INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /dist /dist
RUN pip install --no-cache-dir ${INDEX:+--extra-index-url "$INDEX"} /dist/*.whl && rm -r /dist
# A home and a folder that any user of `docker run --user` can write to; one thread per process, as the trainer sets it.
ENV HOME=/tmp MPLBACKEND=Agg OMP_NUM_THREADS=1
RUN useradd --uid 1000 sparsefl && mkdir --mode 777 /work
USER sparsefl
WORKDIR /work
ENTRYPOINT ["sparsefl"]
CMD ["--help"]
