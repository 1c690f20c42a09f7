"""Files of a report: tables as CSV, Markdown and LaTeX, and the HTML page."""
