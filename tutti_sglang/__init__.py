"""Tutti behind SGLang's hierarchical cache; the only package here that imports sglang and torch."""
