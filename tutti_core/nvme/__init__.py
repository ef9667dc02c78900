"""What is to know of NVMe wherever it is driven from: statuses."""
