from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0006_exports")]

    operations = [
        migrations.AlterField(
            model_name="job",
            name="kind",
            field=models.CharField(
                choices=[
                    ("train", "Train"),
                    ("generate", "Generate"),
                    ("serve", "Serve"),
                    ("export", "Export"),
                    ("profile", "Profile"),
                ],
                default="train",
                max_length=20,
            ),
        ),
    ]
