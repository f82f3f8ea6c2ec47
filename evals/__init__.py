"""Commands that measure: quality, adherence, speed. Each writes the result file that its claim cites."""
