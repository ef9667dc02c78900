"""NVMe controllers that this process drives itself: which there are, and whose they are."""
