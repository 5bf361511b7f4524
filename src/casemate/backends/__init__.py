"""Outside systems: one file each; a file imports without its extra, which is asked for on construction."""
