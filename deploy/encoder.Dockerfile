# The encoder: the towers of a checkpoint. Build from the repository's root:
#   docker build -f deploy/encoder.Dockerfile -t triptych-encoder .
FROM python:3.11-slim

# kernels for CPUs are compiled at the first start
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 triptych
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY triptych triptych
COPY services services
RUN pip install --no-cache-dir -c constraints.txt '.[encoder]'

USER triptych
# checkpoints, read-only; TRIPTYCH_MODEL names one of them, and without it the embedded model is served
VOLUME /models
EXPOSE 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
    CMD ["triptych", "status", "--address", "127.0.0.1:50051", "--service", "triptych.encoder.v1.EncoderService"]
ENTRYPOINT ["python", "-m", "services.encoder"]
CMD ["--host", "0.0.0.0", "--port", "50051"]
