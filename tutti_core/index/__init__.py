"""Which pages are stored where: the tree in memory and the catalog on disk."""
