"""What is kept where: slots, segments and pools, their owners, eviction and saving."""
