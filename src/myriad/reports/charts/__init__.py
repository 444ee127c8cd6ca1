"""Charts as self-contained SVG, all drawn with the kit in `myriad.reports.charts.svg`."""
