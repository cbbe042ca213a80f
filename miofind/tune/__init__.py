"""Measuring many problems on all GPUs of a host: queue, workers, forecast, resume."""
