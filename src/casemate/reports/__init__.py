"""Building blocks of HTML reports: number formats, SVG, templates."""
