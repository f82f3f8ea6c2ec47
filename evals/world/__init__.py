"""A procedural world of captioned clips with sound, and a verifier that reads the caption back out of an mp4."""
