"""The engines: Transformers models, and later vLLM."""
