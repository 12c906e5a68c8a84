# The gateway: no torch in this image. Build from the repository's root:
#   docker build -f deploy/gateway.Dockerfile -t triptych-gateway .
FROM python:3.11-slim

RUN useradd --create-home --uid 10001 triptych
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY triptych triptych
COPY services services
RUN pip install --no-cache-dir -c constraints.txt '.[gateway]'

USER triptych
# checkpoints, read-only; TRIPTYCH_MODEL names one of them, and without it the embedded model is served
VOLUME /models
EXPOSE 50050 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
    CMD ["triptych", "status", "--address", "127.0.0.1:50050", "--service", "triptych.gateway.v1.ChatService"]
ENTRYPOINT ["python", "-m", "services.gateway"]
CMD ["--host", "0.0.0.0", "--port", "50050", "--http-port", "8000"]
