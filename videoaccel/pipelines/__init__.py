"""Model families: one file each, behind the protocol in family.py."""
