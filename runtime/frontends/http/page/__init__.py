"""The server's own page for people: what it does, its models, requests of late, a playground."""
