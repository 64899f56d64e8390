"""Pages as such: elements, plot areas, tables, and the document around them. Nothing here knows what a run is."""
