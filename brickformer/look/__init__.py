"""Looking at models: what they are made of and what they cost."""
