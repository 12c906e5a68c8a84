"""The OpenAI-compatible HTTP door: JSON to :mod:`triptych.gateway.v1` and back. Limits and checks are the gateway's own."""
