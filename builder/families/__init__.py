"""Model families: one file a family, config.json -> DecoderSpec; registry.py is the table."""
