"""What operators get, written from the one source of each: the chart's schema and README tables from the settings tree and
values.yaml, the metrics page from the catalogue, dashboards and alert rules. Runs nothing and knows no cluster.

`python -m services.operations` writes the files into a checkout; tests ask that they are current.
"""
