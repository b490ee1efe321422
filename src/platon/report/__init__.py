"""Tables, figures and a page from the records of finished runs. Never trains."""
