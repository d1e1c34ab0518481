"""Reports that people read: charts as SVG, pages as one HTML file, tables for a terminal."""
