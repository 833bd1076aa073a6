"""What runs on one GPU, how fast, and which paths of the code no GPU has run yet."""
