"""What every service shares: configuration, errors, logs, health, drain, channels. Knows nothing of models; no torch."""
