"""Contracts shared by the builder, the runtime and the clients, without vendor libraries."""
