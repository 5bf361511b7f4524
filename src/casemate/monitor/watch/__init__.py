"""The watch: when canaries are due, who asks them, and the conclusions of each run."""
