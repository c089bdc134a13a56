"""Contracts shared by the builder, the runtime and the clients: no behaviour, no vendors."""
