"""A procedural world of captioned clips with sound, and a verifier that reads captions back out of mp4s."""
