"""The front door: probes, lays out, admits and routes requests, and streams the answers' text. Never decodes media; no torch."""
