"""Tutti behind SGLang, on two routes; the only package here that imports sglang and torch."""
