"""A page that shows a run in the browser, from its store alone: `refrain board`."""
