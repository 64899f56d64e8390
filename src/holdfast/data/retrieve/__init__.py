"""Target data from the web's captions: search, judge, fetch, clean."""
