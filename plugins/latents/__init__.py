"""What the operators of latent attention share."""
