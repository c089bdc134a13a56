"""The server's web page: status, models, recent requests and a playground."""
