"""The page that `report.html` is made from."""
