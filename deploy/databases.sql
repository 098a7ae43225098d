-- Run once, on an empty volume, by PostgreSQL's image; the servers make their tables themselves.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
CREATE DATABASE optuna;
